"""A model cut into stages: its modules, their messages, and the executor that runs them."""
