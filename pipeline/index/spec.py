"""Spec and resources profile of the index job."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.config import Spec, Uri, digest, dump
from pipeline.data.base import Source
from pipeline.index.columns import Representation, Sweep, all_representations, represented_fields
from pipeline.index.listing import ListingJob
from pipeline.index.reader import part_uri
from pipeline.index.stage import Profile, Resources
from pipeline.index.units import UnitLimits
from pipeline.registry import ENCODERS, SOURCES, EncoderSpec, SourceSpec
from pipeline.schema import SEEN
from pipeline.taps import TapName

Items = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=1 << 20, le=1 << 40)]


class FitSample(Spec):
    """Sample of items to which compressors and codecs are fitted."""

    num_items: Items = 256
    """Number of items in the sample."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sample."""
    source: SourceSpec | None = None
    """Separate calibration source. By default the sample is drawn from the indexed items, which
    evaluations of the index report."""


class IndexSpec(Spec):
    """Spec of `jobs.index`."""

    index: Uri
    """Path or URI of the index."""
    source: SourceSpec
    """Source of the items."""
    encoder: EncoderSpec = Field(default_factory=partial(ENCODERS.resolve, "minilm"))
    """Encoder of the items."""
    see: EncoderSpec | None = None
    """Encoder of images and video frames, for representations with `field: image`. Items without
    content for `encoder` are then indexed by what they show."""
    representations: list[Representation] = Field(default_factory=list)
    """Columns of token vectors to store."""
    sweep: Sweep = Field(default_factory=dict)
    """Additional representations: values by field, whose Cartesian product is taken."""
    keep_positions: bool = True
    """Whether to store token positions, for highlights and similarity maps."""
    keep_taps: list[TapName] = Field(default_factory=list)
    """Attention statistics to store, for recompression."""
    rerank: Uri | None = None
    """Folder of an EDJE whose adapter tokens are stored for reranking."""
    unit_items: Items = 64
    """Maximum number of items per unit, the granularity of reading, encoding and resuming."""
    unit_bytes: Bytes = 128 << 20
    """Maximum decoded size of a unit, in bytes, estimated from durations and sizes of files. A
    larger item is a unit."""
    unit_tokens: PositiveInt = 131_072
    """Maximum number of tokens of the texts of a unit, at four bytes per token."""
    fragment_items: Items = 512
    """Maximum number of items per written fragment. Small fragments are merged while the job
    runs."""
    fragment_bytes: Bytes = 256 << 20
    """Maximum size of a written fragment in memory, in bytes."""
    commit_seconds: PositiveFloat = 30.0
    """Time in seconds between commits. Written fragments are visible after a commit; a job that is
    killed loses those since the last one. The time increases if commits take more than 5 % of
    it."""
    commit_bytes: Bytes = 4 << 30
    """Size of written fragments, in bytes, that are committed earlier."""
    commit_items: Items | None = None
    """Number of items that are committed earlier, or null for any number."""
    fit: FitSample = FitSample()
    """Sample on which compressors and codecs that need it are fitted."""

    def calibration(self) -> IndexSpec | None:
        """Returns this spec with its calibration source in place of the source, or None without."""
        if self.fit.source is None:
            return None
        return self.model_copy(update={"source": self.fit.source})

    def payload(self) -> tuple[str, ...]:
        """Returns the inputs of the items that must be read, see `schema.PAYLOAD`."""
        item_fields = represented_fields(all_representations(self))
        encoder = ENCODERS.load(self.encoder.name)
        inputs = [*encoder.supported_inputs(self.encoder)] if "content" in item_fields else []
        inputs += [item_field for item_field in item_fields if item_field == "caption"]
        if self.see is not None:
            see = ENCODERS.load(self.see.name).supported_inputs(self.see)
            inputs += [SEEN, *(name for name in see if name not in inputs)]
        return tuple(inputs)

    def build_source(self) -> Source:
        """Builds the source, which is restricted to the inputs in `payload`."""
        return SOURCES.build(self.source, self.payload())

    def listing_job(self, folder: str, retry_rejects: tuple[str, ...] = ()) -> ListingJob:
        """Returns the settings that the tasks for listing the source share."""
        settings = {"source": dump(self.source), "encoder": dump(self.encoder)}
        spec_digest = digest(settings | ({"see": dump(self.see)} if self.see else {}))
        index, payload = part_uri(self.index), self.payload()
        return ListingJob(
            index, folder, self.source, spec_digest, retry_rejects, payload, self.unit_limits
        )

    @property
    def unit_limits(self) -> UnitLimits:
        """Limits of units."""
        return UnitLimits(self.unit_items, self.unit_bytes, self.unit_tokens)


class IndexResources(Profile):
    """Resources profile of the index job."""

    read: Resources = Resources(num_cpus=0.25, max_actors=2)
    """Tasks that list and read the source."""
    prepare: Resources | None = None
    """Actors that run OCR, speech recognition and image preprocessing. By default the encoding
    actors do so."""
    encode: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Actors that encode."""
    compress: Resources | None = None
    """Actors that compress. By default the encoding actors do so."""
    write: Resources = Resources(num_cpus=0.25)
    """Actors that write fragments."""
    device_map: Literal["auto"] | None = None
    """Set to `auto` to distribute a model that exceeds one GPU over the GPUs of its actor."""
    object_store_bytes: int | None = Field(default=None, ge=75 * 2**20)
    """Size of the object store of a local cluster, in bytes. Ray requires at least 75 MiB."""

    @property
    def placement(self) -> dict[str, Any]:
        """Constructor options that determine on which devices an encoder places its weights."""
        return {"device_map": self.device_map} if self.device_map else {}
