package org.apache.rocketmq.test.base;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.client.consumer.MQPullConsumer;
import org.apache.rocketmq.client.consumer.MQPushConsumer;
import org.apache.rocketmq.client.producer.MQProducer;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.attribute.CQType;
import org.apache.rocketmq.common.attribute.TopicMessageType;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.test.client.rmq.RMQAsyncSendProducer;
import org.apache.rocketmq.test.client.rmq.RMQNormalConsumer;
import org.apache.rocketmq.test.client.rmq.RMQNormalProducer;
import org.apache.rocketmq.test.client.rmq.RMQTransactionalProducer;
import org.apache.rocketmq.test.clientinterface.AbstractMQConsumer;
import org.apache.rocketmq.test.clientinterface.AbstractMQProducer;
import org.apache.rocketmq.test.factory.ConsumerFactory;
import org.apache.rocketmq.test.listener.AbstractListener;
import org.apache.rocketmq.test.util.MQAdminTestUtils;
import org.apache.rocketmq.test.util.MQRandomUtils;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;
import org.apache.rocketmq.tools.admin.MQAdminExt;

/**
 * The base of RocketMQ's broker tests, for brokers that run already. It stands before RocketMQ's
 * class of this name on the class path, and has the members that the tests use.
 *
 * <p>System properties: sluicemq.nameServer is HOST:PORT; sluicemq.brokers is NAME=HOST:PORT, three
 * of them, with commas between; sluicemq.scratch is an empty directory. A BrokerController here is
 * never started: tests ask it for the name and the address of a broker.
 */
public class BaseConf {
    public static final String NAMESRV_ADDR = System.getProperty("sluicemq.nameServer");
    protected static final String CLUSTER_NAME = "DefaultCluster";
    protected static final int BROKER_NUM = 3;
    protected static final int WAIT_TIME = 5;
    protected static final int CONSUME_TIME = 2 * 60 * 1000;
    protected static final int QUEUE_NUMBERS = 8;

    protected static final Map<String, BrokerController> brokerControllerMap = controllers();
    protected static final List<BrokerController> brokerControllerList =
        new ArrayList<>(brokerControllerMap.values());
    protected static final BrokerController brokerController1 = brokerControllerList.get(0);
    protected static final BrokerController brokerController2 = brokerControllerList.get(1);
    protected static final BrokerController brokerController3 = brokerControllerList.get(2);
    protected static final String BROKER1_NAME = name(0);
    protected static final String BROKER2_NAME = name(1);
    protected static final String BROKER3_NAME = name(2);

    protected static List<Object> mqClients = new ArrayList<>();
    protected static boolean debug = false;

    static {
        IntegrationTestBase.initMQAdmin(NAMESRV_ADDR);
    }

    private static String name(int index) {
        return brokerControllerList.get(index).getBrokerConfig().getBrokerName();
    }

    private static Map<String, BrokerController> controllers() {
        Map<String, BrokerController> found = new LinkedHashMap<>();
        for (String entry : System.getProperty("sluicemq.brokers").split(",")) {
            String[] broker = entry.split("[=:]");
            BrokerConfig config = new BrokerConfig();
            config.setBrokerClusterName(CLUSTER_NAME);
            config.setBrokerName(broker[0]);
            config.setBrokerIP1(broker[1]);
            config.setNamesrvAddr(NAMESRV_ADDR);
            NettyServerConfig server = new NettyServerConfig();
            server.setListenPort(Integer.parseInt(broker[2]));
            MessageStoreConfig store = new MessageStoreConfig();
            store.setStorePathRootDir(System.getProperty("sluicemq.scratch") + "/" + broker[0]);
            found.put(broker[0], new BrokerController(config, server, new NettyClientConfig(), store));
        }
        return found;
    }

    public static void waitBrokerRegistered(String nameServer, String cluster, int brokers) {
        // They are registered before the tests begin.
    }

    public boolean awaitDispatchMs(long timeMs) throws Exception {
        return true; // a message that is acknowledged can be read
    }

    public static Set<String> getBrokers() {
        return brokerControllerMap.keySet();
    }

    public static String initTopic() {
        return initTopicWithName(MQRandomUtils.getRandomTopic());
    }

    public static String initTopic(TopicMessageType type) {
        return initTopicWithName(MQRandomUtils.getRandomTopic(), type);
    }

    public static String initTopicWithName(String topic) {
        IntegrationTestBase.initTopic(topic, NAMESRV_ADDR, CLUSTER_NAME, CQType.SimpleCQ);
        return topic;
    }

    public static String initTopicWithName(String topic, TopicMessageType type) {
        IntegrationTestBase.initTopic(topic, NAMESRV_ADDR, CLUSTER_NAME, type);
        return topic;
    }

    public static String initTopicOnSampleTopicBroker(String sample) {
        return initTopicOnSampleTopicBroker(MQRandomUtils.getRandomTopic(), sample);
    }

    public static String initTopicOnSampleTopicBroker(String sample, TopicMessageType type) {
        return initTopicOnSampleTopicBroker(MQRandomUtils.getRandomTopic(), sample, type);
    }

    public static String initTopicOnSampleTopicBroker(String topic, String sample) {
        IntegrationTestBase.initTopic(topic, NAMESRV_ADDR, sample, CQType.SimpleCQ);
        return topic;
    }

    public static String initTopicOnSampleTopicBroker(
        String topic, String sample, TopicMessageType type) {
        IntegrationTestBase.initTopic(topic, NAMESRV_ADDR, sample, type);
        return topic;
    }

    public static String initConsumerGroup() {
        return initConsumerGroup(MQRandomUtils.getRandomConsumerGroup());
    }

    public static String initConsumerGroup(String group) {
        SubscriptionGroupConfig config = new SubscriptionGroupConfig();
        config.setGroupName(group);
        MQAdminTestUtils.createSub(NAMESRV_ADDR, CLUSTER_NAME, config);
        return group;
    }

    public static DefaultMQAdminExt getAdmin(String nameServer) {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(3000);
        admin.setNamesrvAddr(nameServer);
        admin.setPollNameServerInterval(100);
        return kept(admin);
    }

    public static RMQNormalProducer getProducer(String nameServer, String topic) {
        return getProducer(nameServer, topic, false);
    }

    public static RMQNormalProducer getProducer(String nameServer, String topic, boolean tls) {
        return kept(new RMQNormalProducer(nameServer, topic, tls));
    }

    public static RMQNormalProducer getProducer(
        String nameServer, String topic, String group, String instance) {
        return kept(new RMQNormalProducer(nameServer, topic, group, instance));
    }

    public static RMQTransactionalProducer getTransactionalProducer(
        String nameServer, String topic, TransactionListener listener) {
        return kept(new RMQTransactionalProducer(nameServer, topic, false, listener));
    }

    public static RMQAsyncSendProducer getAsyncProducer(String nameServer, String topic) {
        return kept(new RMQAsyncSendProducer(nameServer, topic));
    }

    public static RMQNormalConsumer getConsumer(
        String nameServer, String topic, String tags, AbstractListener listener) {
        return getConsumer(nameServer, topic, tags, listener, false);
    }

    public static RMQNormalConsumer getConsumer(
        String nameServer, String topic, String tags, AbstractListener listener, boolean tls) {
        return getConsumer(nameServer, initConsumerGroup(), topic, tags, listener, tls);
    }

    public static RMQNormalConsumer getConsumer(
        String nameServer, String group, String topic, String tags, AbstractListener listener) {
        return getConsumer(nameServer, group, topic, tags, listener, false);
    }

    public static RMQNormalConsumer getConsumer(String nameServer, String group, String topic,
        String tags, AbstractListener listener, boolean tls) {
        return kept(ConsumerFactory.getRMQNormalConsumer(
            nameServer, group, topic, tags, listener, tls));
    }

    private static <T> T kept(T client) {
        mqClients.add(client);
        return client;
    }

    public static void shutdown() {
        List<Object> clients = mqClients;
        mqClients = new ArrayList<>();
        shutdown(clients);
    }

    public static void shutdown(List<Object> clients) {
        for (Object client : clients) {
            if (client instanceof AbstractMQProducer) {
                ((AbstractMQProducer) client).shutdown();
            } else if (client instanceof AbstractMQConsumer) {
                ((AbstractMQConsumer) client).shutdown();
            } else if (client instanceof MQAdminExt) {
                ((MQAdminExt) client).shutdown();
            } else if (client instanceof MQProducer) {
                ((MQProducer) client).shutdown();
            } else if (client instanceof MQPullConsumer) {
                ((MQPullConsumer) client).shutdown();
            } else if (client instanceof MQPushConsumer) {
                ((MQPushConsumer) client).shutdown();
            }
        }
    }
}
