"""Measurements: this code beside other trainers and engines, on the same model, data, batch and type."""
