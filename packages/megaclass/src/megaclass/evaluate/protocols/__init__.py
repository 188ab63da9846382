"""The table of evaluation protocols. A new protocol is a file beside this one and a line here."""

from megaclass.evaluate.protocol import EvaluationProtocol
from megaclass.evaluate.protocols.distractors import DistractorProtocol
from megaclass.evaluate.protocols.identification import IdentificationProtocol
from megaclass.evaluate.protocols.pairs import PairProtocol
from megaclass.evaluate.protocols.templates import TemplateProtocol

# The first protocol that recognises a path evaluates it. An IJB folder could hold .bin files, so it is asked for first.
PROTOCOLS: dict[str, EvaluationProtocol] = {
    protocol.kind: protocol
    for protocol in (TemplateProtocol(), PairProtocol(), IdentificationProtocol(), DistractorProtocol())
}
