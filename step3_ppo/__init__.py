"""Step 3: PPO against the reward model, on the hybrid engine."""
