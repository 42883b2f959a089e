"""Reads single rollouts: their spans, conversations and answers, the use of each call in training, and tallies."""
