package org.apache.spark.kafka010;

import scala.Tuple2;
import scala.collection.immutable.Seq;

/** See KafkaConfigUpdater: nothing secret to hide. */
public class KafkaRedactionUtil$ {
  public static final KafkaRedactionUtil$ MODULE$ = new KafkaRedactionUtil$();

  public Seq<Tuple2<String, String>> redactParams(Seq<Tuple2<String, Object>> params) {
    @SuppressWarnings("unchecked")
    Seq<Tuple2<String, String>> same = (Seq<Tuple2<String, String>>) (Seq<?>) params;
    return same;
  }
}
