"""Delivery of rollouts and numbers to other systems while a run goes on."""
