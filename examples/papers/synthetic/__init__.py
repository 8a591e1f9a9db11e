"""Synthetic benchmarks: scenes of shapes, and reports that bind attributes."""

#: Import paths of the training data.
SHAPES = "examples.papers.synthetic.shapes_data:Shapes"
BINDING = "examples.papers.synthetic.binding_data:Binding"
