import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.InetSocketAddress;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Fills a broker and says everything it holds, with the unmodified client and tools of one release.
 *
 * <p>Talks as Driver.java does: a line on stdin is {@code COMMAND key=value ...} (values URL-encoded), the answer is
 * JSON lines. It is compiled against the jars of a server (they hold client and tools), 4.9 or 5.3, hence `var` where
 * a class lies in different packages.
 */
public final class Auditor {
    private static final PrintStream OUT = System.out;
    private static final Map<String, Object> CLIENTS = new HashMap<>(); // closing one takes three seconds
    private static final int COMPRESSED_FROM = 4096; // the client's own limit, which it keeps by default

    private static final int NO_MESSAGE = 208;

    private final Map<String, String> options = new HashMap<>();

    private Auditor(String[] words) throws Exception {
        for (int i = 1; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err); // log lines of libraries must not mix with the answers
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                new Auditor(words).run(words[0]);
                emit("done");
            } catch (Throwable error) {
                emit("failed", "error", String.valueOf(error) + Arrays.toString(error.getStackTrace()));
            }
        }
        System.exit(0); // client threads are not daemons
    }

    private void run(String command) throws Exception {
        switch (command) {
            case "send": send(); break;
            case "audit": audit(); break;
            case "commit": commit(); break;
            case "query": query(); break;
            case "create": create(); break;
            case "tables": tables(); break;
            case "admin": admin(); break;
            default: throw new IllegalArgumentException(command);
        }
    }

    // ---- filling

    /** `plain` messages of about `size` bytes and `large` compressible ones in turn, `batches` of ten in queue 0. */
    private void send() throws Exception {
        DefaultMQProducer producer = producer();
        String topic = options.get("topic");
        int queues = number("queues");
        Random random = new Random(7);
        int number = 0;
        for (int i = 0; i < number("plain"); i++, number++) {
            send(producer, message(topic, number, noise(random, number("size"))), i % queues);
        }
        for (int i = 0; i < number("large"); i++, number++) {
            send(producer, message(topic, number, new byte[COMPRESSED_FROM + 5000 * i]), i % queues);
        }
        for (int i = 0; i < number("batches"); i++) {
            List<Message> batch = new ArrayList<>();
            for (int j = 0; j < 10; j++, number++) {
                batch.add(message(topic, number, noise(random, number("size"))));
            }
            SendResult result = producer.send(batch, queue(topic, 0));
            String[] ids = result.getMsgId().split(","), places = result.getOffsetMsgId().split(",");
            for (int j = 0; j < ids.length; j++) { // of a batch in one record there is one
                sent(batch.get(j), true, 0, result.getQueueOffset() + j, ids[j], places[j]);
            }
        }
    }

    private Message message(String topic, int number, byte[] body) throws Exception {
        String name = options.get("prefix") + "-" + number;
        Message message = new Message(topic, number % 3 == 0 ? "" : "tag" + number % 3, "K-" + name + " shared", body);
        message.putUserProperty("name", name);
        message.putUserProperty("\u7528\u6237", "h\u00e9\u4e2d" + number);
        return message;
    }

    private static byte[] noise(Random random, int size) {
        byte[] body = new byte[size / 2 + random.nextInt(size)];
        random.nextBytes(body);
        return body;
    }

    private void send(DefaultMQProducer producer, Message message, int queue) throws Exception {
        byte[] body = message.getBody();
        SendResult result = producer.send(message, queue(message.getTopic(), queue));
        message.setBody(body);
        sent(message, false, queue, result.getQueueOffset(), result.getMsgId(), result.getOffsetMsgId());
    }

    private static void sent(Message message, boolean batch, int queue, long offset, String id, String offsetId)
            throws Exception {
        emit("sent", "name", message.getProperty("name"), "topic", message.getTopic(), "queue", queue, "offset", offset,
            "id", id, "offset_id", offsetId, "tag", message.getTags(), "keys", message.getKeys(),
            "batch", batch, "body", digest(message.getBody()), "user", message.getProperty("\u7528\u6237"));
    }

    // ---- looking

    /** Every queue of the topics: its limits, and every message with everything the client knows of it. */
    private void audit() throws Exception {
        DefaultMQPullConsumer consumer = consumer("auditor-reader");
        for (String topic : options.get("topics").split(",")) {
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) audit(consumer, queue);
        }
    }

    private static void audit(DefaultMQPullConsumer consumer, MessageQueue queue) throws Exception {
        long low = consumer.minOffset(queue), high = consumer.maxOffset(queue);
        long earliest = high > low ? consumer.earliestMsgStoreTime(queue) : -1;
        emit("queue", "topic", queue.getTopic(), "queue", queue.getQueueId(), "low", low, "high", high,
            "earliest", earliest);
        for (long offset = low; offset < high; ) {
            PullResult result = consumer.pull(queue, "*", offset, 32);
            if (result.getPullStatus() != PullStatus.FOUND) {
                throw new IllegalStateException(queue + " at " + offset + ": " + result);
            }
            for (MessageExt message : result.getMsgFoundList()) emitMessage("message", message);
            offset = result.getNextBeginOffset();
        }
    }

    private static void emitMessage(String event, MessageExt message) throws Exception {
        Map<String, String> properties = new TreeMap<>(message.getProperties());
        properties.keySet().removeAll(Arrays.asList("MIN_OFFSET", "MAX_OFFSET")); // of the queue, now
        String offsetId = message instanceof MessageClientExt
            ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId();
        emit(event, "topic", message.getTopic(), "queue", message.getQueueId(), "offset", message.getQueueOffset(),
            "place", message.getCommitLogOffset(), "size", message.getStoreSize(), "id", message.getMsgId(),
            "offset_id", offsetId, "flag", message.getFlag(), "sys_flag", message.getSysFlag(),
            "born_ms", message.getBornTimestamp(), "born", host((InetSocketAddress) message.getBornHost()),
            "stored_ms", message.getStoreTimestamp(), "store", host((InetSocketAddress) message.getStoreHost()),
            "reconsumed", message.getReconsumeTimes(), "prepared", message.getPreparedTransactionOffset(),
            "crc", message.getBodyCRC(), "body", digest(message.getBody()), "properties", properties);
    }

    private static String host(InetSocketAddress address) {
        return address.getAddress().getHostAddress() + " " + address.getPort();
    }

    /** A short body as text, a long one as its digest. */
    private static String digest(byte[] body) throws Exception {
        if (body.length <= 100) return new String(body, StandardCharsets.ISO_8859_1);
        StringBuilder text = new StringBuilder();
        for (byte one : MessageDigest.getInstance("SHA-1").digest(body)) text.append(String.format("%02x", one));
        return text + " " + body.length;
    }

    /** `keys` and `uniques` (the ids that clients give) by the index, `ids` by place, of one topic. */
    private void query() throws Exception {
        String topic = options.get("topic");
        DefaultMQPullConsumer consumer = consumer("auditor-reader");
        for (String key : words("keys")) {
            found(key, () -> consumer.queryMessage(topic, key, 64, 0, Long.MAX_VALUE).getMessageList());
        }
        for (String key : words("uniques")) {
            found(key, () -> Collections.singletonList(
                consumer.getDefaultMQPullConsumerImpl().queryMessageByUniqKey(topic, key)));
        }
        for (String id : words("ids")) emitMessage("viewed", consumer.viewMessage(topic, id));
    }

    private static void found(String key, Callable<List<MessageExt>> question) throws Exception {
        List<String> ids = new ArrayList<>();
        try {
            for (MessageExt message : question.call()) ids.add(((MessageClientExt) message).getOffsetMsgId());
        } catch (MQClientException nothing) {
            if (nothing.getResponseCode() != NO_MESSAGE) throw nothing;
        }
        Collections.sort(ids);
        emit("found", "key", key, "ids", String.join(",", ids));
    }

    // ---- groups, topics, offsets

    private void commit() throws Exception {
        DefaultMQPullConsumer consumer = consumer(options.get("group"));
        consumer.fetchSubscribeMessageQueues(options.get("topic"));
        for (String word : words("offsets")) {
            MessageQueue queue = queue(options.get("topic"), Integer.parseInt(word.split(":")[0]));
            long offset = Long.parseLong(word.split(":")[1]);
            consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, offset, false);
        }
    }

    /** `topics` as NAME:QUEUES, and a `group` whose settings are not the default ones. */
    private void create() throws Exception {
        DefaultMQAdminExt admin = adminExt();
        String broker = options.get("broker");
        for (String word : words("topics")) {
            int queues = Integer.parseInt(word.substring(word.lastIndexOf(':') + 1));
            String name = word.substring(0, word.lastIndexOf(':'));
            admin.createAndUpdateTopicConfig(broker, new TopicConfig(name, queues, queues, 6));
        }
        var group = admin.getAllSubscriptionGroup(broker, 10_000).getSubscriptionGroupTable()
            .get(MixAll.TOOLS_CONSUMER_GROUP);
        group.setGroupName(options.get("group"));
        group.setRetryMaxTimes(7);
        group.setRetryQueueNums(2);
        group.setConsumeBroadcastEnable(false);
        admin.createAndUpdateSubscriptionGroupConfig(broker, group);
    }

    /** Topics and groups as the broker lists them, and the offsets of a group. */
    private void tables() throws Exception {
        DefaultMQAdminExt admin = adminExt();
        String broker = options.get("broker");
        for (var topic : admin.getAllTopicConfig(broker, 10_000).getTopicConfigTable().values()) {
            emit("topic", "name", topic.getTopicName(), "read", topic.getReadQueueNums(),
                "write", topic.getWriteQueueNums(), "perm", topic.getPerm(), "order", topic.isOrder());
        }
        for (var group : admin.getAllSubscriptionGroup(broker, 10_000).getSubscriptionGroupTable().values()) {
            emit("group", "name", group.getGroupName(), "retries", group.getRetryMaxTimes(),
                "retry_queues", group.getRetryQueueNums(), "enabled", group.isConsumeEnable(),
                "broadcast", group.isConsumeBroadcastEnable(), "slow", group.getWhichBrokerWhenConsumeSlowly());
        }
        var offsets = admin.examineConsumeStats(options.get("group"), options.get("topic")).getOffsetTable();
        for (var entry : offsets.entrySet()) {
            emit("offset", "topic", entry.getKey().getTopic(), "queue", entry.getKey().getQueueId(),
                "consumed", entry.getValue().getConsumerOffset(), "end", entry.getValue().getBrokerOffset());
        }
    }

    private void admin() throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream before = System.out; // stderr, see main
        PrintStream capture = new PrintStream(printed, true, "UTF-8");
        System.setOut(capture);
        System.setErr(capture);
        Thread exit = new Thread(() -> emit("failed", "error", printed.toString())); // mqadmin may end the process
        Runtime.getRuntime().addShutdownHook(exit);
        try {
            System.setProperty("rocketmq.namesrv.addr", options.get("ns"));
            org.apache.rocketmq.tools.command.MQAdminStartup.main(options.get("words").split("\n"));
        } finally {
            System.setOut(before);
            System.setErr(before);
            Runtime.getRuntime().removeShutdownHook(exit);
        }
        emit("printed", "text", printed.toString("UTF-8"));
    }

    // ---- clients, which stay for good

    private interface Start<T> {
        void of(T client) throws Exception;
    }

    private DefaultMQProducer producer() throws Exception {
        return client("producer", new DefaultMQProducer("auditor-producer"), producer -> {
            producer.setSendMsgTimeout(10_000);
            producer.start();
        });
    }

    private DefaultMQPullConsumer consumer(String group) throws Exception {
        return client(group, new DefaultMQPullConsumer(group), DefaultMQPullConsumer::start);
    }

    private DefaultMQAdminExt adminExt() throws Exception {
        return client("admin", new DefaultMQAdminExt(10_000), DefaultMQAdminExt::start);
    }

    @SuppressWarnings("unchecked")
    private <T extends ClientConfig> T client(String name, T fresh, Start<T> start) throws Exception {
        if (!CLIENTS.containsKey(name)) {
            start.of(configured(fresh));
            CLIENTS.put(name, fresh);
        }
        return (T) CLIENTS.get(name);
    }

    // ---- odds and ends

    private static MessageQueue queue(String topic, int queue) {
        return new MessageQueue(topic, "broker-a", queue);
    }

    private <T extends ClientConfig> T configured(T client) {
        client.setNamesrvAddr(options.get("ns"));
        client.setClientIP("127.0.0.1");
        client.setInstanceName("auditor-" + System.nanoTime());
        return client;
    }

    private String[] words(String key) {
        String text = options.getOrDefault(key, "");
        return text.isEmpty() ? new String[0] : text.split(",");
    }

    private int number(String key) {
        return Integer.parseInt(options.getOrDefault(key, "0"));
    }

    private static void emit(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\": ").append(json(event));
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(", ").append(json(pairs[i])).append(": ").append(json(pairs[i + 1]));
        }
        synchronized (OUT) {
            OUT.println(line.append('}'));
            OUT.flush();
        }
    }

    private static String json(Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) return String.valueOf(value);
        if (value instanceof Map) {
            List<String> members = new ArrayList<>();
            ((Map<?, ?>) value).forEach((key, one) -> members.add(json(key) + ": " + json(one)));
            return "{" + String.join(", ", members) + "}";
        }
        StringBuilder text = new StringBuilder("\"");
        for (char letter : String.valueOf(value).toCharArray()) {
            boolean plain = letter >= ' ' && letter < 127 && letter != '"' && letter != '\\';
            text.append(plain ? String.valueOf(letter) : String.format("\\u%04x", (int) letter));
        }
        return text.append('"').toString();
    }
}
