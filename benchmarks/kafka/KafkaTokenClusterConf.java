package org.apache.spark.kafka010;

/** See KafkaConfigUpdater. */
public class KafkaTokenClusterConf {}
