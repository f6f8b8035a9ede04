"""Settings of the fine-tuner: environment variables with the prefix ``RYZANSTEIN_``."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import CommaList, ServiceSettings


class FinetunerSettings(ServiceSettings):
    """Read once, at start."""

    finetuner_models: dict[str, str] = Field(
        description="JSON: names of served models, and the folder of safetensors or the GGUF file of each, which jobs "
        "may start from"
    )
    finetuner_folder: str = Field(
        min_length=1, description="Folder of jobs, checkpoints and adapters; workers must be able to read it"
    )
    finetuner_checkpoint_s: float = Field(
        default=300.0, ge=1, description="A checkpoint is written after every epoch, and when the last one is this old"
    )
    finetuner_attempts: int = Field(
        default=3, ge=1, description="Starts of a training without progress before the job fails"
    )
    finetuner_keep_days: float = Field(
        default=30.0,
        gt=0,
        description="How long the folder of a job is kept after its end if no adapter in it is served; its training "
        "data is removed within minutes",
    )
    finetuner_max_tokens: int = Field(default=2048, ge=16, description="Longest example, and most tokens at once")
    finetuner_parallel: int = Field(default=1, ge=1, description="Jobs that are trained at a time")
    finetuner_quantizations: CommaList = Field(
        default=(), description="Allowed values of jobs; default: `none`, and `nf4` where bitsandbytes is installed"
    )
    finetuner_job_template: str = Field(
        default="",
        description="File with a Kubernetes Job as JSON, from which each training is made; default: processes",
    )
    finetuner_threads: int = Field(default=0, ge=0, description="Threads that compute; 0: one for each usable core")
    finetuner_nice: int = Field(
        default=10, ge=0, le=19, description="Niceness of a training: the higher, the more others go first"
    )
