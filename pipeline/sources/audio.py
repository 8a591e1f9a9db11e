"""Audio files: windows of sound."""

from __future__ import annotations

from typing import Literal

from pipeline.sources.windows import UNIT_BYTES, WindowSource, WindowSpec


class Audio(WindowSource["Audio.Spec"]):
    """The windows of audio files: one item a window, the file its parent.

    **Ids.** `<file>#t=<start>,<end>` in seconds; that of a whole file is the file's.

    **Sound.** Payload `audio`: one channel, the mean of those that the file has, at `sample_rate`,
    read window by window, from pause to pause (`border_shift`). A file's length is what can be
    read of it, not what its header says.

    **What it reads.** WAV, FLAC, Ogg and MP3 by libsndfile; what that does not know (AAC, M4A,
    the track of a video under such a name) by FFmpeg, by what they hold and not by their names.

    **Metadata.** `duration`, and `sample_rate` and `channels` of the file; `truncated`, True, of
    a file that ends before its header says it does.
    """

    class Spec(WindowSpec):
        """Options of the audio source; see `WindowSpec`."""

        name: Literal["audio"] = "audio"

    gives = ("item_id", "audio")
    suffixes = (".wav", ".flac", ".ogg", ".mp3", ".m4a", ".aac", ".opus")
    module = "audio"
    files_per_shard = 16
    modality = "audio"

    def __init__(self, spec: Spec, wants: tuple[str, ...] = ("text",)):
        super().__init__(spec, wants)
        if "audio" in wants:
            self.max_unit_items = max(1, int(UNIT_BYTES / self._audio_bytes()))
