"""Chains the three stages."""
