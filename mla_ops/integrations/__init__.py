"""Other libraries running on our ops; each is imported only by who asks for it."""
