"""The table of evaluation protocols. A new protocol is a file next to this one and a line here."""

from megaclass.evaluation.protocol import EvaluationProtocol
from megaclass.evaluation.protocols.classification import ClassificationProtocol
from megaclass.evaluation.protocols.identification import DistractorProtocol, IdentificationProtocol
from megaclass.evaluation.protocols.pairs import PairProtocol
from megaclass.evaluation.protocols.retrieval import RetrievalProtocol
from megaclass.evaluation.protocols.templates import TemplateProtocol

# The first protocol that recognises a path evaluates it. An IJB folder could hold .bin files, so it is asked for first.
PROTOCOLS: dict[str, EvaluationProtocol] = {
    protocol.kind: protocol
    for protocol in (
        TemplateProtocol(),
        PairProtocol(),
        ClassificationProtocol(),
        IdentificationProtocol(),
        RetrievalProtocol(),
        DistractorProtocol(),
    )
}
