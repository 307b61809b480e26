"""Programs that run another trainer or engine on the benchmark's data. They import nothing of rlhf but `recorder`."""
