"""LangChain and LangGraph agents in agl rollouts; the tracer is :class:`agl_langchain.tracer.LangChainTracer`."""
