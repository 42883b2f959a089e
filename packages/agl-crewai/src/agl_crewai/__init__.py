"""CrewAI agents in agl: the tracer is :class:`agl_crewai.tracer.CrewAITracer`, registered as ``crewai``."""
