"""Check machines before ranks start on them: `rlhf check`, and `rlhf run` with a hostfile."""
