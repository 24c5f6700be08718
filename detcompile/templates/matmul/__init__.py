"""Matrix products, the gates of MLPs that join them, and batches of products."""
