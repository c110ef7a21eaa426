"""Weights in files of Hugging Face's layout: read into an engine, exported from an engine or a checkpoint. Knows no
trainer.
"""
