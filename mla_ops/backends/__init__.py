"""What decode runs on; `capability.py` chooses."""
