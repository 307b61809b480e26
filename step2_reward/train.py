"""Step 2: the reward model.

Run with `deepspeed --module step2_reward.train --config reward.yaml`, or as one plain process with `python -m`.
"""
