"""The page at /: a playground, what the engines do, receipts and the certificate, and the JSON that it reads."""
