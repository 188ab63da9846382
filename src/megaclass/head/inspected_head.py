"""The head's answers to questions about its centres: which classes are alike, and which are closest to an embedding.

Every rank holds a part of the classes, so that each question is collective. The arithmetic is in inspect.py. Nothing here
changes a centre or needs a gradient.
"""

from torch import Tensor

from megaclass.head.head_module import HeadModule
from megaclass.head.inspect import centres_of, closest_classes, cosines_with_all, nearest_to
from megaclass.head.settings import check_embeddings


class InspectedHead(HeadModule):
    """A head whose centres can be asked for and compared with. PartialFC adds the training step."""

    def centres(self, class_ids: Tensor) -> Tensor:
        """Collective. Returns the (N, D) centres of these classes on every rank; (N, M, D) with sub-centres.

        class_ids: (N,), the same on every rank. An all-reduce of N * M * D numbers.
        """
        return centres_of(self.store, class_ids, self.settings.num_classes, self.group)

    def nearest(self, class_id: int, k: int = 10) -> tuple[Tensor, Tensor]:
        """Collective. Returns the k classes most similar to this one, best first: ids and cosines, the same on every rank.

        With sub-centres two classes are as similar as their closest pair. An all-reduce of M * D numbers, two
        all-gathers of W * k.
        """
        return nearest_to(self.store, class_id, k, self.settings.num_classes, self.group)

    def logits(self, embeddings_BD: Tensor) -> Tensor:
        """Collective. Returns scale * cosine of these embeddings with all classes, (B, C), without margin and gradient.

        For the accuracy on a batch: `(head.logits(embeddings).argmax(1) == labels).float().mean()`. With sub-centres the
        closest one of a class counts. Each rank holds B * C numbers afterwards; predict() needs less memory. An all-gather
        of the embeddings, and one of B * C numbers per rank.
        """
        self._settle_on(embeddings_BD.device)
        check_embeddings(self.settings, embeddings_BD, self.rank, self.device)
        cosines_BC = cosines_with_all(self.store, embeddings_BD, self.settings.num_classes, self.group)
        return cosines_BC.mul_(self.settings.margin.scale)

    def predict(self, embeddings_BD: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Collective. Returns the k classes closest to each embedding, best first: ids and cosines, both (B, k).

        Memory for 65,536 classes at a time. An all-gather of the embeddings, and two of W * G * k numbers.
        """
        self._settle_on(embeddings_BD.device)
        check_embeddings(self.settings, embeddings_BD, self.rank, self.device)
        return closest_classes(self.store, embeddings_BD, k, self.settings.num_classes, self.group)
