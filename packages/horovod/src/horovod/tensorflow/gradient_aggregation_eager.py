from horovod.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper as LocalGradientAggregationHelperEager,
)
