"""Builds the components that an experiment names: store, gateway, policies, rewards, sinks."""
