"""Step 2: the reward model."""
