"""A fleet on one machine: real Redis, routers, coordinator and gateways, and processes of simulated workers."""
