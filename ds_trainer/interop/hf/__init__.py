"""Arguments of the Hugging Face Trainer."""
