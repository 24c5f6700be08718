"""The page at /: a playground, the engines' state, receipts and the certificate."""
