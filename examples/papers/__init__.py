"""Tables and figures of the papers, studies of their methods, and the data that both generate."""
