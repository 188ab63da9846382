"""Finds out why no rank makes progress: collects stacks (stacks.py), groups them (verdict.py). Standard library only."""
