"""DeepSpeed JSON files, one for each way to run a model; README.md says which is for what."""
