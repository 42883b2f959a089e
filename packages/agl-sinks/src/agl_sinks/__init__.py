"""agl_sinks: sends runs to W&B, MLflow, TensorBoard, webhooks and tracing backends."""
