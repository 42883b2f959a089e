"""AutoGen agents in agl: the tracer is :class:`agl_autogen.tracer.AutoGenTracer`, registered as ``autogen``."""
