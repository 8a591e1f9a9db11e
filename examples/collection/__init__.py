"""An open collection of passages and queries, made from packages of Debian."""
