"""The data that the algorithms learn from: collected rollouts, files of texts, teachers and feedback."""
