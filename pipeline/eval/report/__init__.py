"""Reports of evaluations: tables, figures and HTML pages. `files.write` writes all of them."""
