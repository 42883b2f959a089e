"""Texts of candidates and their lineage, messages, filled templates and demonstrations."""
