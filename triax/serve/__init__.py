"""Answering: continue prompts with a trained model."""
