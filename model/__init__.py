"""What is trained: a T5 of our own, its loss, its generation, and the Hugging Face folder format."""
