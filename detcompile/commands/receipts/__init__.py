"""Commands over receipts: keys that sign them, replay of one, and audits of a log."""
