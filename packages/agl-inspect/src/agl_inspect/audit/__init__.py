"""Audits a run: which patterns of answers, such as length or flattery, go with higher rewards, and how sure that is."""
