"""Specs of the index job: what is computed, and how much hardware each step takes."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from pipeline.config import Spec, Uri, digest, dump
from pipeline.index.columns import Representation, Sweep, aspects_of, every_representation
from pipeline.index.listing import ListingJob
from pipeline.index.reader import part
from pipeline.registry import ENCODERS, SOURCES, EncoderSpec, SourceSpec
from pipeline.sources import Source
from pipeline.stage import Resources
from pipeline.taps import TapName

Items = Annotated[int, Field(ge=1, le=1_000_000)]


class FitSample(Spec):
    """Sample of items on which compressors and codecs are fitted."""

    num_items: Items = 256
    """Number of items in the sample."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sample."""
    source: SourceSpec | None = None
    """A separate source for calibration. By default the sample is drawn from the items that are
    indexed, and evaluations of the index report that."""


class IndexSpec(Spec):
    """Spec of `jobs.index`."""

    index: Uri
    """Path or URI of the index."""
    source: SourceSpec
    """The items to index."""
    encoder: EncoderSpec = Field(default_factory=partial(ENCODERS.resolve, "minilm"))
    """The model that encodes them."""
    representations: list[Representation] = Field(default_factory=list)
    """Columns of token vectors to store."""
    sweep: Sweep = Field(default_factory=dict)
    """Further representations: values by field, of which the product is taken."""
    keep_positions: bool = True
    """Whether to store the position of each token, for marked words and similarity maps."""
    keep_taps: list[TapName] = Field(default_factory=list)
    """Attention statistics to store, for recompression."""
    rerank: Uri | None = None
    """Folder of an EDJE; its adapter's tokens are stored for reranking."""
    unit_items: Items = 64
    """Number of items that are encoded, written and committed together."""
    fragment_items: Items = 512
    """Maximum number of items per written fragment."""
    commit_items: Items = 1024
    """Number of items after which the driver commits."""
    commit_seconds: PositiveFloat = 30.0
    """Time after which the driver commits, if `commit_items` are not reached before."""
    fit: FitSample = FitSample()
    """Sample on which compressors and codecs that need it are fitted."""

    def calibration(self) -> IndexSpec | None:
        """Returns this spec with its calibration source as source; None if it has none."""
        if self.fit.source is None:
            return None
        return self.model_copy(update={"source": self.fit.source})

    def payload(self) -> tuple[str, ...]:
        """Returns the fields of the items that are read, see `schema.PAYLOAD`."""
        aspects = aspects_of(every_representation(self))
        encoder = ENCODERS.load(self.encoder.name)
        content = encoder.supported_inputs(self.encoder) if "content" in aspects else ()
        return (*content, *(aspect for aspect in aspects if aspect != "content"))

    def build_source(self) -> Source:
        """Returns the source, which reads the fields in `payload`."""
        return SOURCES.build(self.source, self.payload())

    def listing_job(self, folder: str, retry_rejects: tuple[str, ...] = ()) -> ListingJob:
        """Returns the settings that the tasks which list the source share.

        Args:
            folder: Folder of the job, under the index.
            retry_rejects: Reasons whose rejects are retried.
        """
        deciding = digest({"source": dump(self.source), "encoder": dump(self.encoder)})
        index = part(self.index)
        return ListingJob(index, folder, self.source, deciding, retry_rejects, self.payload())


class IndexResources(Spec):
    """Resources profile of the index job: how much hardware each step takes."""

    read: Resources = Resources(num_cpus=0.25, max_actors=2)
    """Tasks that list and read the source."""
    prepare: Resources | None = None
    """Actors that recognise text and speech and process images; by default the encoder's."""
    encode: Resources = Resources(num_cpus=1.0, num_threads=2)
    """Actors that encode."""
    compress: Resources | None = None
    """Actors that compress; by default the encoder's."""
    write: Resources = Resources(num_cpus=0.25)
    """Actors that write fragments."""
    device_map: Literal["auto"] | None = None
    """`auto` spreads a model over the GPUs of its actor, for models larger than one GPU."""
    object_store_bytes: int | None = Field(default=None, ge=75 * 2**20)
    """Size of the object store of a local cluster, in bytes; Ray requires at least 75 MiB."""

    @property
    def placement(self) -> dict[str, Any]:
        """Options of an encoder's constructor that place its weights on devices."""
        return {"device_map": self.device_map} if self.device_map else {}
