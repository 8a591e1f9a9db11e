"""The source of audio files."""

from __future__ import annotations

from typing import Literal

from pipeline.data.windows import MIN_AUDIO_RATE, WindowSource, WindowSpec


class Audio(WindowSource["Audio.Spec"]):
    """Time windows of audio files, one item per window.

    **Ids.** `<file>#t=<start>,<end>` in seconds. The id of an entire file is its path. The parent
    of an item is the file.

    **Audio.** Payload `audio`: one channel, the mean of all channels, at `sample_rate`, read window
    by window between pauses (`border_shift`). A channel that is the negative of another one is
    inverted, because they would cancel each other. The duration of a file is that of the readable
    audio, which may differ from its header.

    **Formats.** libsndfile reads WAV, FLAC, Ogg and MP3. FFmpeg reads all other formats, such as
    AAC, M4A and the audio tracks of videos. The format is detected from the content, not from the
    suffix.

    **Metadata.** `duration`; `sample_rate` and `channels` of the file. `truncated`, True, if the
    file is shorter than its header specifies.
    """

    class Spec(WindowSpec):
        """Options of the audio source."""

        name: Literal["audio"] = "audio"

    provides = ("item_id", "audio")
    suffixes = (".wav", ".flac", ".ogg", ".mp3", ".m4a", ".aac", ".opus")
    module = "audio"
    files_per_shard = 4096
    modality = "audio"
    min_rate = MIN_AUDIO_RATE
