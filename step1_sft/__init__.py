"""Step 1: supervised fine-tuning."""
