"""Reads single rollouts: spans, conversations, answers, the use of each call in training, and tallies."""
