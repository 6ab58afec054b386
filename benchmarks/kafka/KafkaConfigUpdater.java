package org.apache.spark.kafka010;

import java.util.HashMap;
import java.util.Map;
import scala.Option;

/**
 * Stands in for Spark's token provider where its jar cannot be had: Kafka without authentication.
 * Compiled by benchmarks/spark_kafka.py; never part of the product.
 */
public class KafkaConfigUpdater {
  private final Map<String, Object> found = new HashMap<>();

  public KafkaConfigUpdater(String module, scala.collection.immutable.Map<String, Object> given) {
    found.putAll(scala.jdk.javaapi.CollectionConverters.asJava(given));
  }

  public KafkaConfigUpdater set(String key, Object value) {
    found.put(key, value);
    return this;
  }

  public KafkaConfigUpdater setIfUnset(String key, Object value) {
    found.putIfAbsent(key, value);
    return this;
  }

  public KafkaConfigUpdater setAuthenticationConfigIfNeeded() {
    return this;
  }

  public KafkaConfigUpdater setAuthenticationConfigIfNeeded(Option<?> cluster) {
    return this;
  }

  public Map<String, Object> build() {
    return found;
  }
}
