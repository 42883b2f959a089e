"""Building the parts that an experiment names: store, gateway, policies, rewards, sinks."""
