"""Sources of what the algorithms learn from: collected rollouts, files of texts, teachers and feedback."""
