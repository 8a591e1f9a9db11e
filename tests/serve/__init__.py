"""Tests of the server. As a package, its applications end with its last test."""
