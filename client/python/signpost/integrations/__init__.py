"""Signpost's optimizers in the trainers of others: a module for each, which imports that trainer."""
