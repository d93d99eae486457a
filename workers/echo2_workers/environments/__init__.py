"""Built-in environments. None imports torch; packages of the extra `envs` are imported where
they are used."""
